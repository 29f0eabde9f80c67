"""Who may speak in a run, and for whom.

A run has one authority. It signs a certificate for each peer, which binds the peer's own key to its
name; peers believe no other signature. A token lets a peer ask for its certificate.

    certificates.py   keys and certificates, and the files of a peer that has one
    authority.py      who signs, lets in and takes back
    tokens.py         what one pastes to be let in
    renewal.py        how it comes to a later certificate
    serving.py        the certificate that a server shows
    gate.py           what a caller may ask of a node by its own, and which count no more
    words.py          what a peer says of itself, signed

What stands below is for the coordinator too. It loads no torch; the last two do.
"""

from murmuration.worker.identity.authority import (
    PEER_VALID_S,
    TOKEN_USES,
    TOKEN_VALID_S,
    Authority,
    TokenRecord,
    enrol,
    revoked_peer,
    subject,
)
from murmuration.worker.identity.certificates import (
    FOLDER,
    Certified,
    Identity,
    IdentityError,
    NotValidNow,
    Role,
    Verifier,
    certified_key,
    certified_name,
    is_encrypted_run,
    member_identity,
    signer,
)
from murmuration.worker.identity.renewal import Renewal
from murmuration.worker.identity.tokens import Token, token_from

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
    "Role",
    "Token",
    "TokenRecord",
    "Verifier",
    "certified_key",
    "certified_name",
    "enrol",
    "is_encrypted_run",
    "member_identity",
    "revoked_peer",
    "signer",
    "subject",
    "token_from",
]
