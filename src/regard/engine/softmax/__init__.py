"""Parts that all backends share: the score pipeline, chosen rows, sinks, dropout, the online softmax."""
