"""The text side: what turns messages into tokens and tokens into text.

Light libraries only (`tokenizers`, jinja2): it lives in the daemon, which must start fast and
never load mlx.
"""
