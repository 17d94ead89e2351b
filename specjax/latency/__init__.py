"""When speculation pays: yields, rooflines, measured costs.  Numbers in, numbers out."""
