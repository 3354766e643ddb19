"""``python -m federated.client``: one device of a federated job, with Python and NumPy alone."""

from __future__ import annotations

from federated.client_run import main

if __name__ == "__main__":
    main()
