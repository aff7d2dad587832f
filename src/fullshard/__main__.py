"""`python -m fullshard`, and `torchrun -m fullshard train`."""

from fullshard.cli.main import main

if __name__ == "__main__":
    main()
