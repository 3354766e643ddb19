from collections.abc import Callable

from flwr.app import Context

class Grid: ...

_Main = Callable[[Grid, Context], None]

class ServerApp:
    def main(self) -> Callable[[_Main], _Main]: ...
