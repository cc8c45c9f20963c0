"""RMSNorm and LayerNorm, both passes, against other libraries and the memory's limit."""
