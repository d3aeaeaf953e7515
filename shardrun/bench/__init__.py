"""The same work under shardrun and under each peer, side by side on the user's own machine."""
