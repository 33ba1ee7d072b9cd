"""python -m headwise.integrations.nanochat ... -- -m a_module_of_nanochat ...

The script becomes __main__ in its turn, so everything that it compiles lives in other modules.
"""

import sys

from headwise.integrations.nanochat.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
