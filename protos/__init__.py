"""The words of processes to each other: messages, documents, events, addresses, exit codes."""

import os
import sys

# Loaded without this, gRPC would act around each fork of the process, whichever thread forks. With
# gRPC's own threads running that crashes the child: one in three runs with forked loader workers
# lost a peer, and none without. It reads the variable when it is imported.
_FORKS = "GRPC_ENABLE_FORK_SUPPORT"

FORKS_CRASH = "grpc" in sys.modules and os.environ.get(_FORKS) != "0"
os.environ[_FORKS] = "0"
