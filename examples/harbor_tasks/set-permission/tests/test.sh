#!/bin/sh
if [ "$(stat -c %a words.txt)" = 600 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
