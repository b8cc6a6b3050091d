"""`python -m treeopt` is `treeopt`."""

from treeopt.cli import main

if __name__ == "__main__":
    main()
