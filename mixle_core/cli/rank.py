"""What the launcher starts on every rank: the same command line again."""

from mixle_core.cli import main

if __name__ == "__main__":
    main()
