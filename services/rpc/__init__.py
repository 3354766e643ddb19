"""Calls between our processes: ZeroMQ, MessagePack headers, raw arrays."""

from services.rpc.aio import AsyncRpcClient
from services.rpc.calls import Outgoing
from services.rpc.client import RpcClient
from services.rpc.codec import Failure, Reply, Request
from services.rpc.errors import (
    KeysError,
    MalformedMessage,
    MessageTooLarge,
    NoAnswer,
    QueueFull,
    RemoteFailure,
    RpcError,
)
from services.rpc.security import KeyPair, Security
from services.rpc.server import Call, RpcServer, ServerLimits

__all__ = [
    "AsyncRpcClient",
    "Call",
    "Failure",
    "KeyPair",
    "KeysError",
    "MalformedMessage",
    "MessageTooLarge",
    "NoAnswer",
    "Outgoing",
    "QueueFull",
    "RemoteFailure",
    "Reply",
    "Request",
    "RpcClient",
    "RpcError",
    "RpcServer",
    "Security",
    "ServerLimits",
]
