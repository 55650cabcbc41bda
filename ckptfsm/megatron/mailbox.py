"""Where the mailbox was: scripts of users import it from here."""

import sys

from ckptfsm.dcp import mailbox

sys.modules[__name__] = mailbox
