"""Who may speak in a run, and for whom.

A run has one authority, which signs a certificate for each peer (docs/adr/0017).

    certificates.py   keys and certificates, and the files of a peer that has one
    authority.py      who signs, lets in, renews and takes back
    tokens.py         what one pastes to be let in
    serving.py        the certificate that a server shows
    gate.py           what a caller may ask of a node by its own, and which count no more
    words.py          what a peer says of itself, signed

All but the last two are for the coordinator too: they load no torch.
"""
