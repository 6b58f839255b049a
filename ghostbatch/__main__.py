"""``python -m ghostbatch`` runs the ``ghostbatch`` command."""

from ghostbatch.cli import main

if __name__ == "__main__":
    main()
