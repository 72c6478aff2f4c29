#!/bin/sh
if [ "$(sh add.sh 2 3)" = 5 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
