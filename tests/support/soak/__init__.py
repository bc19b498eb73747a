"""A cluster at work while everything befalls it at random, for as long as one likes.

``run`` goes round by round: ``moving``, ``altering`` and ``troubles`` are tables of actions, and each table
has a lane that takes one action after another; meanwhile ``writers`` and ``loads`` write, and ``records``
keeps what was acknowledged to them. ``field`` is the cluster, ``scene`` what actions act on, ``commands``
runs shardids as processes of their own, ``checks`` is what must hold after each round, ``log`` tells what was
done.
"""
