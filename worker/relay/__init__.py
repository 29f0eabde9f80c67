"""Peers that can only dial out are reached through peers that can be dialled.

    X  --TLS--  X's end  ==gRPC==  relay  ==gRPC==  R's end  --TLS--  R

`choice` decides which relays a peer has, `table` what a relay carries and for whom: both without
I/O. `io` keeps the streams of a peer that is relayed, `service` serves as a relay, `tunnels` are
the two ends. The relay sees the records of a TLS connection between X and R, and none of the keys.
"""
