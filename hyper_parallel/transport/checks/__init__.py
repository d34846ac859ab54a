"""What ranks do together is compared before it is carried out: one record, one comparison, adapters."""
