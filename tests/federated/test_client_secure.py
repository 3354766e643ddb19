"""What a device makes of a broken protocol: where another client may have done it, it comes back; else it is gone."""

from __future__ import annotations

import pytest
from support.secagg import names, plan

from federated.client_http import Answer
from federated.client_secure import RoundLost, SecureRound, ServerDistrusted
from federated.secagg.client import Client, Identity
from federated.secagg.keys import Registrar, SigningKey
from federated.secagg.messages import Choice, Neighbours, Roster, read_as
from federated.secagg.roster import Context, leaf

CONTEXT, REGISTRAR = Context("job", 1), Registrar()


def member(name: str) -> Client:
    on = plan("secagg+", True, clients=120, length=4, neighbours=20, colluding=0.0, dropouts=0.0)
    key = SigningKey()
    identity = Identity(key, REGISTRAR.certify(CONTEXT.job, name, key.public))
    return Client(on, CONTEXT, name, identity, REGISTRAR.public)


def at_neighbours() -> tuple[SecureRound, int]:
    """A device of 120 that has chosen its neighbours, and its position."""
    clients = [member(name) for name in names(120)]
    leaves = tuple(leaf(CONTEXT, client.name, client._own) for client in clients)
    own = SecureRound(clients[7], clients[7].plan.stages, "/path", 1, b"ticket")
    own.received(Answer(204, b""))
    own.received(Answer(200, Roster(120, 7, leaves, ()).to_bytes()))
    assert len(read_as(Choice, own.call().body).holders) == 20
    own.received(Answer(204, b""))
    return own, 7


def test_colluding_clients_that_all_choose_one_device_cost_it_one_iteration() -> None:
    own, position = at_neighbours()
    choosers = tuple(other for other in range(120) if other != position)[:101]
    with pytest.raises(RoundLost, match="flooded: 101 clients"):
        own.received(Answer(200, Neighbours(120, choosers, ()).to_bytes()))


def test_a_server_that_says_a_device_chose_itself_is_not_trusted_again() -> None:
    own, position = at_neighbours()
    with pytest.raises(ServerDistrusted, match="graph"):
        own.received(Answer(200, Neighbours(120, (position,), ()).to_bytes()))
