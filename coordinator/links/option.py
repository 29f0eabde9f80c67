"""`--link-means`, as `murmur swarm` and `murmur bench` take it."""

import click

from coordinator.links import MEANS

link_means_option = click.option(
    "--link-means",
    type=click.Choice(MEANS),
    default="auto",
    show_default=True,
    help="What makes links slow; namespaces need root.",
)
