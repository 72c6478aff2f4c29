#!/bin/sh
if [ "$(cat answer.txt)" = birds/b.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
