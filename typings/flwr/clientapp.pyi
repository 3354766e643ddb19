from collections.abc import Callable

from flwr.app import Context, Message

_Handler = Callable[[Message, Context], Message]

class ClientApp:
    def train(self) -> Callable[[_Handler], _Handler]: ...
