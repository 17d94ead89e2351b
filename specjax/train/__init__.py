"""From text to trained weights: corpora, batches, losses, the loop."""
