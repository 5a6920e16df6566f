"""DSpark block drafters: a small network that proposes several tokens at once for a target.

Everything here runs on the engine's MLX thread. A drafter reads the outputs of chosen target
layers (taps), keeps them as keys and values of its own context, and predicts a whole block of
tokens in one pass; a light sequential head ties the tokens of the block together.
"""
