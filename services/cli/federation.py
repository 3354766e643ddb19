"""``headwater fl``: federated learning."""

from __future__ import annotations

from services.cli import (
    attack,
    cohort,
    epsilon,
    job_keys,
    joining,
    psi,
    rounds,
    signing,
    simulate,
    teach,
    vertical,
)
from services.cli.groups import group

app = group("Federated learning: simulate it here, or run its servers and clients.")

simulate.register(app)
rounds.register(app)
job_keys.register(app)
joining.register(app)
cohort.register(app)
signing.register(app)
teach.register(app)
attack.register(app)
epsilon.register(app)
app.add_typer(psi.app, name="psi")
app.add_typer(vertical.app, name="vertical")
