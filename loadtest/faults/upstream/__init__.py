"""A replica that goes wrong on demand."""
