#!/bin/sh
if [ "$(head -n 1 capitals.txt)" = PEAR ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
