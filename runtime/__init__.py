"""What both sides share when they touch the world: sockets, discovery, settings, logs, and the client."""
