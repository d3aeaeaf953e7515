"""Which parameters are meant, what all ranks agree they are, and where each element lives in the flat buffers."""
