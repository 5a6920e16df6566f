"""`python -m daemon`: the same as the program `sparklane`, without its having been installed."""

from daemon.cli import main

main()
