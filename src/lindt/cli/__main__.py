"""`python -m lindt.cli`."""

from lindt.cli.main import main

main()
