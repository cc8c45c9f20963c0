"""RMSNorm and LayerNorm, forward and backward, beside other libraries and the memory's limit."""
