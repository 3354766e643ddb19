"""What all tests share: one thread for each library, as every process of ours has it; and no test that time decides.

Threads are set before NumPy or torch load. Two busy test processes with two torch threads each took five times as long
on two cores.
"""

import os

from hypothesis import HealthCheck, settings

from services.processes import limit_threads

limit_threads(os.environ)
# A busy machine makes an example slow, not wrong.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
