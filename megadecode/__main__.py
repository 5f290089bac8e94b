"""`python -m megadecode`: the command, for where its script is not on the path."""

from megadecode.cli import main

if __name__ == "__main__":
    main()
