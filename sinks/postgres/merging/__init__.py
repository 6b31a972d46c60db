"""The driver's merge of a batch, from staging tables into the target."""
