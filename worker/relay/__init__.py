"""Peers that can only dial out are reached through peers that can be dialled.

    X  --TLS--  X's end  ==gRPC==  relay  ==gRPC==  R's end  --TLS--  R

`choice` decides, without I/O, which relays a peer has, and `relayed` keeps the streams of a peer
that has some. `service` serves as a relay, without TLS' keys; `tunnels` are the two ends.
"""
