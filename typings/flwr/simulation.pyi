from collections.abc import Mapping

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

def run_simulation(
    server_app: ServerApp,
    client_app: ClientApp,
    num_supernodes: int,
    backend_config: Mapping[str, Mapping[str, float | str | bool]],
) -> None: ...
