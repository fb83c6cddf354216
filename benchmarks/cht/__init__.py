"""The chunked hash tree of the decode scheduler, timed beside what there is instead: `rachis bench cht`."""
