"""Run the command line as `python -m kvstore`, where the command `kvstore` is not on the path."""

from kvstore.cli.app import main

if __name__ == "__main__":
    main()
