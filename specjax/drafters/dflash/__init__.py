"""Block diffusion: a backbone that fills a block in one pass (`backbone`), its three drafters, losses, published files."""
