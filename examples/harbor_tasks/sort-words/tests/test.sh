#!/bin/sh
if [ "$(head -n 1 words.txt)" = apple ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
