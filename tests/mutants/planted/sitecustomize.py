"""Plants the mutant that ``CKPTFSM_MUTANT`` names, in every interpreter that a layer starts.

Python imports this by its name as it starts; the runner puts this directory on the path.
"""

import os

if os.environ.get("CKPTFSM_MUTANT"):
    from mutants.catalogue import by_name
    from mutants.loader import install

    install(by_name(os.environ["CKPTFSM_MUTANT"]))
