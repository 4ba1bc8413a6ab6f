# The real provider with keys that open nothing: it renders every policy while planning, offline.
provider "aws" {
  region                      = "eu-west-1"
  access_key                  = "fake"
  secret_key                  = "fake"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_region_validation      = true
  skip_requesting_account_id  = true
}

override_data {
  target = data.aws_caller_identity.current
  values = { account_id = "111122223333" }
}

# ARNs that a plan does not know yet, so that what refers to them can be compared.
override_resource {
  target          = aws_iam_policy.access["reader"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/reader" }
}

override_resource {
  target          = aws_iam_policy.access["writer"]
  override_during = plan
  values          = { arn = "arn:aws:iam::111122223333:policy/writer" }
}

run "express" {
  command = plan

  variables {
    name                 = "cache"
    storage              = "express"
    availability_zone_id = "euw1-az1"
    kms_key_arn          = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
    gateway_endpoint     = { vpc_id = "vpc-1", route_table_ids = ["rtb-1"] }
    max_bucket_gib       = 1
  }

  assert {
    condition = length(concat(
      aws_s3_bucket.this,
      aws_s3_bucket_public_access_block.this,
      aws_s3_bucket_ownership_controls.this,
      aws_s3_bucket_metric.this,
      aws_cloudwatch_metric_alarm.errors,
      aws_cloudwatch_metric_alarm.latency,
    )) == 0
    error_message = "what a directory bucket does not know must not be made"
  }

  assert {
    condition = [
      aws_s3_directory_bucket.this[0].bucket,
      aws_s3_directory_bucket.this[0].location[0].name,
    ] == ["cache--euw1-az1--x-s3", "euw1-az1"] && aws_s3_directory_bucket.this[0].force_destroy == true
    error_message = "there must be a directory bucket in the zone"
  }

  assert {
    condition = [for rule in aws_s3_bucket_server_side_encryption_configuration.this.rule : [
      rule.apply_server_side_encryption_by_default[0].sse_algorithm,
      rule.apply_server_side_encryption_by_default[0].kms_master_key_id,
      tostring(rule.bucket_key_enabled),
    ]] == [["aws:kms", var.kms_key_arn, "true"]]
    error_message = "a directory bucket's key needs a bucket key"
  }

  assert {
    condition = jsonencode([for rule in aws_s3_bucket_lifecycle_configuration.this.rule : [
      rule.status, rule.expiration[*].days, rule.abort_incomplete_multipart_upload[*].days_after_initiation, length(rule.transition)
    ]]) == jsonencode([["Enabled", [7], [], 0], ["Enabled", [], [1], 0]])
    error_message = "a directory bucket must be cleaned as well"
  }

  assert {
    condition = jsondecode(aws_s3_bucket_policy.this.policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "DenyWithoutTls"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3express:*"
          Resource  = "arn:aws:s3express:eu-west-1:111122223333:bucket/cache--euw1-az1--x-s3"
          Condition = { Bool = { "aws:SecureTransport" = "false" } }
        },
        {
          Sid       = "DenyOldTls"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3express:*"
          Resource  = "arn:aws:s3express:eu-west-1:111122223333:bucket/cache--euw1-az1--x-s3"
          Condition = { NumericLessThan = { "s3express:TlsVersion" = "1.2" } }
        },
        {
          Sid       = "AllowExpiry"
          Effect    = "Allow"
          Principal = { Service = "lifecycle.s3.amazonaws.com" }
          Action    = "s3express:CreateSession"
          Resource  = "arn:aws:s3express:eu-west-1:111122223333:bucket/cache--euw1-az1--x-s3"
          Condition = {
            StringEquals = {
              "aws:SourceAccount"     = "111122223333"
              "s3express:SessionMode" = "ReadWrite"
            }
          }
        },
      ]
    }
    error_message = "bucket policy: ${aws_s3_bucket_policy.this.policy}"
  }

  assert {
    condition = jsondecode(aws_iam_policy.access["reader"].policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid       = "Session"
          Effect    = "Allow"
          Action    = "s3express:CreateSession"
          Resource  = "arn:aws:s3express:eu-west-1:111122223333:bucket/cache--euw1-az1--x-s3"
          Condition = { StringEquals = { "s3express:SessionMode" = "ReadOnly" } }
        },
        {
          Sid       = "Key"
          Effect    = "Allow"
          Action    = "kms:Decrypt"
          Resource  = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
          Condition = { StringEquals = { "kms:ViaService" = ["s3.eu-west-1.amazonaws.com", "s3express.eu-west-1.amazonaws.com"] } }
        },
      ]
    }
    error_message = "reader: ${aws_iam_policy.access["reader"].policy}"
  }

  assert {
    condition = jsondecode(aws_iam_policy.access["writer"].policy) == {
      Version = "2012-10-17"
      Statement = [
        {
          Sid      = "Session"
          Effect   = "Allow"
          Action   = "s3express:CreateSession"
          Resource = "arn:aws:s3express:eu-west-1:111122223333:bucket/cache--euw1-az1--x-s3"
        },
        {
          Sid       = "Key"
          Effect    = "Allow"
          Action    = ["kms:GenerateDataKey", "kms:Decrypt"]
          Resource  = "arn:aws:kms:eu-west-1:111122223333:key/11111111-2222-3333-4444-555555555555"
          Condition = { StringEquals = { "kms:ViaService" = ["s3.eu-west-1.amazonaws.com", "s3express.eu-west-1.amazonaws.com"] } }
        },
      ]
    }
    error_message = "writer: ${aws_iam_policy.access["writer"].policy}"
  }

  assert {
    condition = jsondecode(aws_vpc_endpoint.this[0].policy) == {
      Version = "2012-10-17"
      Statement = [{
        Sid       = "Session"
        Effect    = "Allow"
        Principal = "*"
        Action    = "s3express:CreateSession"
        Resource  = "arn:aws:s3express:eu-west-1:111122223333:bucket/cache--euw1-az1--x-s3"
      }]
    }
    error_message = "endpoint: ${aws_vpc_endpoint.this[0].policy}"
  }

  assert {
    condition     = aws_vpc_endpoint.this[0].service_name == "com.amazonaws.eu-west-1.s3express"
    error_message = "directory buckets have an endpoint of their own"
  }

  assert {
    condition     = aws_cloudwatch_metric_alarm.size[0].dimensions == tomap({ BucketName = "cache--euw1-az1--x-s3", StorageType = "ExpressOneZoneStorage" })
    error_message = "the size of a directory bucket is counted in a storage type of its own"
  }

  assert {
    condition     = jsondecode(output.kv_transfer_config).kv_connector_extra_config == { bucket = "cache--euw1-az1--x-s3", prefix = "s3kv", region = "eu-west-1" }
    error_message = "in a directory bucket nothing is refreshed"
  }

  assert {
    condition     = length(jsondecode(aws_cloudwatch_dashboard.this[0].dashboard_body).widgets) == 2
    error_message = "without request metrics the dashboard must not show them"
  }
}

run "express_watched" {
  command = plan

  variables {
    name                 = "cache"
    storage              = "express"
    availability_zone_id = "euw1-az1"
    request_metrics      = true
    force_destroy        = false
    expiration_days      = 2
  }

  assert {
    condition     = aws_s3_bucket_metric.this[0].name == "EntireBucket" && aws_cloudwatch_metric_alarm.latency[0].threshold == 50
    error_message = "request metrics must be on where they are asked for, and a first byte be expected sooner"
  }

  assert {
    condition     = aws_s3_directory_bucket.this[0].force_destroy == false
    error_message = "force_destroy must be the caller's to turn off"
  }
}
