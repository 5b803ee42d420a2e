"""What travels between broker, stages and clients: ids, limits, errors, frames and messages. Pure."""
