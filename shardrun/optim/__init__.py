"""torch.optim over slices: which optimizers may be cut, and how one is proposed before it is committed."""
