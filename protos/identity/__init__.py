"""Who may speak in a run, and for whom: keys, certificates, tokens.

A run has one authority. It signs a certificate for each peer, which binds the peer's own key to its
name; peers believe no other signature. A token lets a peer ask for its certificate.

    IdentityError   somebody is not let in, or a file or token cannot be used; one line for the user
"""

from murmuration.protos.identity.authority import (
    PEER_VALID_S,
    TOKEN_USES,
    TOKEN_VALID_S,
    Authority,
    TokenRecord,
    enrol,
)
from murmuration.protos.identity.certificates import (
    FOLDER,
    Certified,
    Identity,
    IdentityError,
    NotValidNow,
    Role,
    Verifier,
    certified_key,
    certified_name,
    is_of_a_run,
    member_identity,
    signer,
)
from murmuration.protos.identity.renewal import Renewal
from murmuration.protos.identity.revocation import Revocations, revoked_peer, subject
from murmuration.protos.identity.token import Token, token_from

__all__ = [
    "FOLDER",
    "PEER_VALID_S",
    "TOKEN_USES",
    "TOKEN_VALID_S",
    "Authority",
    "Certified",
    "Identity",
    "IdentityError",
    "NotValidNow",
    "Renewal",
    "Revocations",
    "Role",
    "Token",
    "TokenRecord",
    "Verifier",
    "certified_key",
    "certified_name",
    "enrol",
    "is_of_a_run",
    "member_identity",
    "revoked_peer",
    "signer",
    "subject",
    "token_from",
]
