"""Which device holds which layers. Pure: measured facts in, a plan and its reasons out."""
