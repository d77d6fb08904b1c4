"""What an operator runs: `twostroke up`, `run`, `chat`, `trace` ... Starts services as processes; holds no tensor."""
