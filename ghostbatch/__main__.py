"""``python -m ghostbatch`` is ``ghostbatch``."""

from ghostbatch.cli import main

if __name__ == "__main__":
    main()
