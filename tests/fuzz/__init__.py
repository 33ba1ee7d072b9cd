"""Bad inputs for every command and every file format, made by a generator with a seed.

    python -m tests.fuzz --cases 1000 --seed 1        a campaign; what fails is kept in corpus/

`values.py` spoils values, documents and bytes; `options.py`, `formats.py`, `data.py`, `stores.py`
and `code.py` make cases of them, a group per command or format; `cases.py` picks a group by seed
and number. `worker.py` runs a case in a process of its own kind and says what it broke;
`campaign.py` runs many. `test_fuzz.py` replays the corpus and a fixed share of the cases.
"""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])  # pytest has it on its path already
if TESTS not in sys.path:
    sys.path.append(TESTS)
