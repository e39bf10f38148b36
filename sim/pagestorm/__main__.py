"""`python -m pagestorm` is `pagestorm`."""

from pagestorm.cli import main

if __name__ == "__main__":
    main()
