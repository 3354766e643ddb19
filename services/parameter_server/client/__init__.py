"""What asks the parameter servers: a blocking and an asyncio client, and tools that look at all of them."""

from services.parameter_server.client.aio import AsyncParameterClient
from services.parameter_server.client.blocking import ParameterClient

__all__ = ["AsyncParameterClient", "ParameterClient"]
