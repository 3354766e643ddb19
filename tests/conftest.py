"""What all tests share: one thread for each library, as every process of ours has it.

Set before NumPy or torch load. Two busy test processes with two torch threads each took five times as long on two
cores.
"""

import os

from services.processes import limit_threads

limit_threads(os.environ)
